"""Objects on S3: requests with retries and a shared pace, uploads in parts, s5cmd for many at once."""
