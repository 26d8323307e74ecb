"""The front end. gRPC reads its log level when it is imported, which every module here may do: so it is set before.

It has a line for each connection that is no gRPC and for each malformed header, as many as a stranger cares to send.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
