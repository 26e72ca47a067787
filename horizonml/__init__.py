"""HorizonML: train a neural network together on the small machines you already have."""

import os

__version__ = "0.1.0"

# Threads that wait for others sleep instead of spinning, which would keep the very threads they wait for off their
# cores. OpenMP reads this once, when torch loads it; what the user has set stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What goes wrong between ranks is told in words; PyTorch's own warnings about it are pages of C++ stack frames.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
