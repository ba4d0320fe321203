"""The CPU backend: C++ compiled on first use, called through ctypes."""
