"""Reading Parquet files in place."""
