"""Images: where they come from, how they are packed, two views of each, and batches as a pure function of seed and
step. Nothing here knows an encoder.
"""
