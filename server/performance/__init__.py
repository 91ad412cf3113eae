"""The performance of the calls of jobs: totals of what node agents report, and documents made of them."""
