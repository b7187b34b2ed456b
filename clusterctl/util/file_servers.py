"""The file systems of file servers, by the kernel's names, for programs and Ansible's modules on hosts
as well.
"""

FILE_SERVERS = frozenset(
    "9p afs beegfs ceph cifs gpfs lustre nfs nfs4 panfs pvfs2 smb3 smbfs virtiofs wekafs".split()
)
