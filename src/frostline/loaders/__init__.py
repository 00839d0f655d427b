"""The loader and the job: features in, batches out."""
