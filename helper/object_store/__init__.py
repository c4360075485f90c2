"""Object stores (S3 and what speaks like it): small objects under names, with writes that ask for a condition.

base.py         the protocol, and where something is kept there (`s3://bucket/prefix`)
credentials.py  a credentials file of the usual form
s3.py           the protocol over obstore, imported only where a setting needs it
"""
