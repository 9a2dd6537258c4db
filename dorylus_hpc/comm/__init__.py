"""Everything that talks MPI: placement of parts, halo exchange, weight transport, failure agreement."""
