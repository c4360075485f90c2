"""S3-compatible object stores: small named objects with conditional writes."""
