"""A reproduction study of Momentum Contrast (He et al. 2019, arXiv 1911.05722)."""

__version__ = "0.1.0"
