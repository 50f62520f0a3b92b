"""From scores to kept tokens: budgets, allocations over heads and layers, top-k."""
