"""Objects on S3: requests with retries, uploads in parts, s5cmd for many objects."""
