"""Tables and figures from trial results. Nothing here measures; `promote` registers the champion in MLflow."""
