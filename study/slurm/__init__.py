"""A sweep on a cluster: arrays of jobs, the ledger of what was submitted, what the scheduler says of it, and what
runs inside a job. No room but this one knows a Slurm command; what is done and missing is asked of `study.launch`.
"""
