"""Encoder, dictionary, InfoNCE, and the model that ties them in the order of the paper's Algorithm 1."""
