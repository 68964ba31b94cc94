"""Encoder, dictionary, InfoNCE, and the model that ties them in the order of the paper's Algorithm 1. Tensors in,
tensors out: no file, no data set and no loop over steps.
"""
