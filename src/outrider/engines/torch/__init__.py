"""The engine on transformers and torch, with a fused path for CUDA."""
