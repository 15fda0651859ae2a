"""The engine on llama.cpp, for GGUF files on CPUs."""
