"""All that is known of transformers: attention hooks, masks, model parts, generation, loading."""
