"""Raw rows to data: encoders, columns on disk, preparation."""
