"""One run in memory: Algorithm 1 step by step, what is read of the encoder on the way and at the end, and encoders
that come and go as files. All that outlasts the process is written through `study.run`.
"""
