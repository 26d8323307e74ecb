"""The front end. gRPC reads its log level when it is imported, which every module here may do: so it is set before.

Its informative lines are one for each connection that is no gRPC, as many as a scanner of ports cares to make.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
