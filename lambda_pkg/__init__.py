"""What a worker needs, and nothing else: the standard library and NumPy.

This package is the archive that is uploaded to AWS Lambda; the graph servers import it too, so that
the dense stage maths exists once. It imports nothing else of this project.
"""

VERSION = "2"  # of the protocol and of what an archive can compute
