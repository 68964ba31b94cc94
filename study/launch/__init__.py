"""What of a sweep is done, missing and running, and the training of what is missing on this machine: the plan, the
table of it, the pool of processes, and one run in one process. Nothing here knows Slurm, and the launcher itself
needs neither torch nor MLflow: those belong to the processes that it starts.
"""
