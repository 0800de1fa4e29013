"""What a cell was seen to use: DataLoaders, optimizers, modules."""
