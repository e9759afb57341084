"""Model files to `ModelPackage`: exact bytes per layer. Pure over bytes."""
