"""From facts to a cause: rules, their thresholds and their sentences."""
