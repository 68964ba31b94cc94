"""From a sweep's YAML to points, from points to a plan, from a plan to running processes."""
