"""HorizonML: train a neural network together on the small machines you already have."""

__version__ = "0.1.0"
