"""Reading and writing the table that maps a request's positions to key/value cache slots."""
