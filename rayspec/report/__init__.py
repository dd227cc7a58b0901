"""Tables and figures from trial results. Nothing here measures or stores."""
