# Written by clusterctl: a login shell in a job keeps the Python of the job.
case ":$PATH:" in
    *":${CLUSTERCTL_PATH:-$PATH}:"*) ;;
    *) PATH=$CLUSTERCTL_PATH:$PATH ;;
esac
