"""S3-compatible object stores: small named objects with conditional writes.

bucket.py       the bucket protocol and locations (`s3://bucket/path`)
credentials.py  credentials files
s3.py           the protocol over obstore, imported only if the configuration needs it
"""
