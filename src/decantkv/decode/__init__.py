"""Decoding over kept keys: steps as CUDA graphs and fused operations. Experimental; nothing below imports it."""
