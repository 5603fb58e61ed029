"""Transformer layers and models on packed tokens."""
