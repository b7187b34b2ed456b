"""Operations on a whole cluster: up, down, plan, converge, verify, and the management of nodes."""
