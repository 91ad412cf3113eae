"""Jobs, node agents and HTTP servers that exist only in a test or a benchmark: no processes, no torch.

A job for a test is one of these:

- `scripted_job`: the test makes each call of each rank, and runs the diagnosis.
- `model_job`: ranks run programs whose calls complete as a backend completes them; `model_cluster`
  adds node agents and an unreliable network. For properties that hold for any job.
- `parallel_job`: a job of thousands of ranks, computed for any moment. For the load of a server.
- `simulated_job`: a small job that trains or hangs in real time, with any texts; `job_reporter` reports
  it over HTTP. For servers and pages.

The node agent's own code composes the heartbeats of the first three.
"""
