"""What a sweep and a claim say: YAML in, points with their signatures out, faults named in one line. Nothing here
looks at a run or starts one.
"""
