"""How the calls of jobs perform: totals of what node agents report, and the documents made of them."""
