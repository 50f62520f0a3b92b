"""Where kept tokens live: dense and ragged buffers, layers of transformers' own."""
