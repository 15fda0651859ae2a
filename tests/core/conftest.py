"""Rows here are tiny: threads would only get in each other's way."""

import torch

torch.set_num_threads(1)
