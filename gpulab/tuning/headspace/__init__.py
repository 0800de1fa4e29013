"""How much faster a cell could be if its data cost nothing."""
