"""Secrets as they occur in logs, specs and records, and ordinary facts that look similar.

The secrets are made up, in the form that the named programs give them.
"""

from __future__ import annotations

import base64
import json
import random
from typing import Final

KEY: Final = "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----\n"
PORTS: Final = range(6817, 6837)  # each stands beside a secret, and must stay
_RANDOM: Final = random.Random(7)  # noqa: S311 - the same words in each run


def _random(size: int) -> str:
    return base64.b64encode(_RANDOM.randbytes(size)).decode()


# A key's lines, the first cut.
WRAPPED: Final = [
    "Y3V0IG9mZg",
    _random(48),
    _random(48),
    "b2YgdGhlIGxhc3Q=",
]
LOGGED: Final = [_random(48), "b2YgYSBqb3VybmFs"]
DOCKER: Final = base64.b64encode(b"$oauthtoken:of-docker").decode()
AWS: Final = _random(30)  # as long as a secret access key
MUNGE_LINE: Final = _random(57)

# Secret -> text of a log, a spec or a record that contains it.
PLANTED: Final = {
    # names and their values
    "hunter2-of-slurm": "AccountingStoragePass=hunter2-of-slurm",
    "correct horse battery": 'ansible_become_password: "correct horse battery"',
    "wJalrXUtnFEMIK7MDENG": "aws_secret_access_key: wJalrXUtnFEMIK7MDENG",
    "wandb-0123456789": "submit --env WANDB_API_KEY=wandb-0123456789 -- train",
    "my-passphrase-1": "gpg --passphrase my-passphrase-1 --sign",
    "after-a,comma": "password: after-a,comma",
    "of-pass": "ldap:\n  pass: of-pass\n  port: 6817",
    "of-pwd": "Server=db;Port=6818;Pwd=of-pwd",
    "of-pw": "export DB_PW=of-pw",
    "of-cifs": "mount -t cifs -o username=ada,pass=of-cifs //nas/data /data",
    "of-nslcd": "bindpw of-nslcd",
    "of-wireguard": "PresharedKey = of-wireguard",
    "of-azure": "AccountName=lab;AccountKey=of-azure;EndpointSuffix=core.windows.net",
    "of-ssh-key": "ssh_key: of-ssh-key",
    "of-signing": "signing_key: of-signing",
    "of-a-license": "LICENSE_KEY=of-a-license ./install",
    "of-a-query": "GET https://example.org/v1?key=of-a-query&port=6819",
    "of-xml": "<server><password>of-xml</password><port>6820</port></server>",
    "of-a-subscript": 'os.environ["DB_PASSWORD"] = "of-a-subscript"',
    "of-perl": '{"password" => "of-perl", "port" => 6821}',
    "s-quoted": "password: 'it''s-quoted'",
    "s-plain": "password: it's-plain",
    "not-closed": "password: 'not-closed",
    "over two": 'password: "folded\n  over two"\nport: 6822',
    # blocks, lists and mappings
    "of-a-block": "ssl:\n  password: |\n    of-a-block\n  port: 6823",
    "last line of it": (
        "- token: >-  # folded\n\n    first one\n\n    last line of it\n  port: 6824"
    ),
    "of-a-diff": "+passphrase: |2\n+  one\n+  of-a-diff\n+port: 6825",
    "6638643965396161": (
        "db_password: !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  6638643965396161\nport: 6826"
    ),
    "6162646566303132": "$ANSIBLE_VAULT;1.2;AES256;dev\n6162646566303132\n3334\n",
    "below-a-comment": "password: # of the database\n  below-a-comment\nport: 6827",
    "of-a-heredoc": "password = <<EOT\nof-a-heredoc\nEOT\nport = 6828",
    "block-in-JSON": json.dumps(
        {"stdout": 'a:\n  secret: |\n    one "two"\n    block-in-JSON\nport: 6829'}
    ),
    "list-a1b2c3": '{"tokens": ["first]", "list-a1b2c3"], "port": 6830}',
    "indented-list": json.dumps(
        {"api_keys": ["one", ["two", "indented-list"]], "port": 6831}, indent=2
    ),
    "list-in-JSON": json.dumps(
        {"stdout": json.dumps({"tokens": ["one", "list-in-JSON"], "port": 6832})}
    ),
    "list-of-YAML": "tokens:\n- one\n- list-of-YAML\nport: 6833",
    "of-a-mapping": '{"credentials": {"one": "two", "three": "of-a-mapping"}, "port": 6834}',
    "open-ended": "port 6835\ntokens: ['one', 'open-ended",
    "of-a-pair": "env:\n- name: DB_PASSWORD\n  value: of-a-pair\n- name: PORT\n  value: 6836",
    "JSON-pair": json.dumps({"env": [{"name": "API_TOKEN", "value": "JSON-pair"}]}, indent=2),
    "pair-in-JSON": json.dumps(
        {"stdout": json.dumps({"key": "DB_PASSWORD", "value": "pair-in-JSON"})}
    ),
    # command lines, as text and as lists
    "of-sshpass": "sshpass -p of-sshpass ssh head",
    "of-curl": "curl -sS -u ada:of-curl https://example.org",
    "of-netrc": "machine pypi.example.org login ada password of-netrc",
    "of-mysql": "GRANT ALL ON *.* TO slurm IDENTIFIED BY 'of-mysql'",
    "94BDCEBE19083CE2A1F959FD02F964C7AF4CFC29": (
        "IDENTIFIED BY PASSWORD '*94BDCEBE19083CE2A1F959FD02F964C7AF4CFC29'"
    ),
    "of-via": "ALTER USER slurm IDENTIFIED VIA mysql_native_password USING PASSWORD('of-via')",
    "Hunter22aa": json.dumps({"cmd": ["mysql", "--password", "Hunter22aa"]}),
    "of-a-list": json.dumps({"cmd": ["curl", "-s", "-u", "ada:of-a-list"]}),
    "of-lines": json.dumps({"cmd": ["sshpass", "-p", "of-lines"]}, indent=2),
    "of-items": "cmd:\n- mysqladmin\n- --password\n- of-items\n- status",
    "SQLPASS": "mysql -uroot -pSQLPASS slurm_acct_db",
    "of-sudo": "echo of-sudo | sudo -S dnf upgrade",
    "of-chpasswd": "echo ada:of-chpasswd | chpasswd",
    "of-stdin": "printf '%s' of-stdin | sudo docker login nvcr.io -u ada --password-stdin",
    "of-here": "sudo chpasswd <<< ada:of-here",
    "of-lines-of-it": "chpasswd <<EOF\nada:of-lines-of-it\nEOF",
    "of-ipmi": "ipmitool -I lanplus -H bmc1 -U admin -P of-ipmi power status",
    "of-ldap": "ldapsearch -x -D cn=admin -w of-ldap uid=ada",
    "of-redis": "redis-cli -h head -a of-redis ping",
    "of-login": "podman login -u ada -p of-login registry.example.org",
    "0123456789abcdef0123456789abcdef01234567": "wandb login 0123456789abcdef0123456789abcdef01234567",
    # URLs and headers
    "s3cr3t-of-the-index": "--extra-index-url https://ada:s3cr3t-of-the-index@pypi.example.org/simple",
    "sqlpass99": "mysql://slurm:sqlpass99@localhost/slurm_acct_db",
    "in@the/middle": "https://ada:in@the/middle@index.example.org/simple",
    "of-the-proxy": "http_proxy=ada:of-the-proxy@proxy.example.org:3128",
    "of-a-signed-url": "https://example.org/a?X-Goog-Signature=of-a-signed-url&x=1",
    "dXNlcjpwYXNzd29yZA==": "Authorization: Basic dXNlcjpwYXNzd29yZA==",
    "of-a-digest": "Authorization: Digest of-a-digest",
    "of-a-bearer": "curl -H 'X-Forward: Bearer of-a-bearer' https://example.org",
    "T0/B0/of-slack": "posted to https://hooks.slack.com/services/T0/B0/of-slack",
    "1122334455/of-discord": "posted to https://discord.com/api/webhooks/1122334455/of-discord",
    "1a2b@3c4d/IncomingWebhook/of-teams": "https://lab.webhook.office.com/webhookb2/1a2b@3c4d/IncomingWebhook/of-teams",
    DOCKER: json.dumps({"auths": {"nvcr.io": {"auth": DOCKER}}}),
    # forms of tokens
    "ghp_0123456789abcdefghij0123456789ab": "cloned with ghp_0123456789abcdefghij0123456789ab",
    "glrt-0123456789abcdefghij": "gitlab-runner 17: glrt-0123456789abcdefghij",
    "hf_abcdefghijklmnopqrstuvwx": "srun train hf_abcdefghijklmnopqrstuvwx",
    "sk-proj-abcdef0123456789": "OPENAI: sk-proj-abcdef0123456789",
    "xoxb-0123456789-abcdef": "bot xoxb-0123456789-abcdef",
    "npm_0123456789abcdefghij0123456789abcdef": "//registry/ npm_0123456789abcdefghij0123456789abcdef",
    "pypi-AgEIcHlwaS5vcmcCJDAx": "twine upload pypi-AgEIcHlwaS5vcmcCJDAx",
    "AKIAIOSFODNN7EXAMPLE": "aws: AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA-0123456789abcdef": "maps AIzaSyA-0123456789abcdef",
    "ya29.a0AfH6SMBxxxxxxxxxxxx": '{"access": "ya29.a0AfH6SMBxxxxxxxxxxxx"}',
    "GOCSPX-0123456789abcdefghij": "client 12-ab.apps.googleusercontent.com GOCSPX-0123456789abcdefghij",
    "1//0gAbCdEfGhIjKlMnOp": "refresh: 1//0gAbCdEfGhIjKlMnOp",
    "nvapi-0123456789abcdefghij": "ngc config set nvapi-0123456789abcdefghij",
    "dckr_pat_0123456789abcdefghij": "docker: dckr_pat_0123456789abcdefghij",
    "hvs.CAESIJ0123456789abcdef": "vault: hvs.CAESIJ0123456789abcdef",
    "SG.0123456789abcdefghijkl.mnop": "mail: SG.0123456789abcdefghijkl.mnop",
    "a1B2c3D4e5F6g7.atlasv1.abcdefghij": "app.terraform.io a1B2c3D4e5F6g7.atlasv1.abcdefghij",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.c2ln": "jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.c2ln here",
    "AGE-SECRET-KEY-1QYQSZQGPQYQSZQGP": "# created: 2026\nAGE-SECRET-KEY-1QYQSZQGPQYQSZQGP",
    "$6$saltsalt$abcdefghijklmnopqrstuvwxyz": "root:$6$saltsalt$abcdefghijklmnopqrstuvwxyz:19000:0:",
    "$apr1$saltsalt$abcdefghijklmnopqrstuv": "ada:$apr1$saltsalt$abcdefghijklmnopqrstuv",
    "{SSHA}abcdefghijklmnopqrstuvwxyz": "dn: uid=ada {SSHA}abcdefghijklmnopqrstuvwxyz",
    # private keys, whole and cut off
    "b64keyb64keyb64keyb64key": KEY.format("b64keyb64keyb64keyb64key"),
    "b64inJSONb64inJSON": json.dumps({"stdout": KEY.format("b64inJSONb64inJSON")}),
    WRAPPED[0]: "\n".join([*WRAPPED, "-----END RSA PRIVATE KEY-----"]),
    WRAPPED[1]: "\n".join([*WRAPPED, "-----END RSA PRIVATE KEY-----"]),
    WRAPPED[3]: json.dumps("\n".join([*WRAPPED, "-----END RSA PRIVATE KEY-----"])),
    LOGGED[1]: "\n".join(f"head app[7]: {line}" for line in [*LOGGED, "-----END PRIVATE KEY-----"]),
    "of-PuTTY": (
        "PuTTY-User-Key-File-3: ssh-ed25519\n"
        "Comment: ada\n"
        "Private-Lines: 1\n"
        "of-PuTTY\n"
        "Private-MAC: 0f"
    ),
    "of-cut-PuTTY": "Private-Lines: 1\nof-cut-PuTTY\nPrivate-MAC: 0f1e",
    "of-SSH2": (
        "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\n"
        "of-SSH2\n"
        "---- END SSH2 ENCRYPTED PRIVATE KEY ----"
    ),
    # long random words, whatever they are
    AWS: f"configure set {AWS}",
    MUNGE_LINE: f"# base64 /etc/munge/munge.key\n{MUNGE_LINE}",
}

# Ordinary facts that must not be removed, as the named programs print them.
FACTS: Final = """\
fatal: [demo-train-1]: FAILED! => {'msg': 'No package matching slurm-slurmd found', 'rc': 100}
ok: [demo-ctl] => {"changed": false, "checksum": "da39a3ee5e6b4b0d3255bfef95601890afd80709", "mode": "0644"}
demo-train-1 : ok=52 changed=3 unreachable=0 failed=0 skipped=14 rescued=0 ignored=0
9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08  /etc/munge/munge.key
SHA512: ee26b0dd4af7e749aa1a8ee3c10ae9923f618980772e473f8819a5d4940e0db27ac185f8a0e1d5f84f88bc887fd67b143732c304cc5fa9ad8e6f57f50028a8ff
  "digest": "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    "h1:HpfG2sfDWmd3MTKMAcKMiFhtJZSm6kjcAvsnw6rBjCY=",
    "zh:0f9707bb4e5e7b6a9c1a5b9bd4dd1a8a9fbbb2d9a4d5f1b5c8e0e2e4a6f8c0d2",
host_key: ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKeyOfTheDoubleKeyOfTheDoubleKeyOfThe
demo-ctl ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBKGxN0uY7TfVQ2kq8Zr1Wm5sXy9Bv4Ld6Hj3Pc0Ae
ssh_keys: [ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKeyOfTheDoubleKeyOfTheDoubleKeyOfThe ada@laptop]
Accepted publickey for rocky from 10.0.0.5 port 50022 ssh2: ED25519 SHA256:mVPwvezndPv/ARoIadVY98vAC0g+P/5633yTC4d/wXE
Failed password for invalid user ada from 10.0.0.5 port 50022 ssh2
slurmd: error: Unable to register: Zero Bytes were transmitted or received
slurmctld: error: Munge decode failed: Invalid credential
/var/log/slurm/slurmctld.log: Invalid authentication credential
gpgkey=file:///etc/pki/rpm-gpg/RPM-GPG-KEY-Rocky-9
curl https://mirrors.rockylinux.org/mirrorlist?arch=x86_64&repo=BaseOS-9
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2
AccountingStorageEnforce=associations,limits,qos
SlurmctldParameters=enable_configless
NodeName=demo-train-[1-2] CPUs=2 RealMemory=11571 State=UNKNOWN Gres=gpu:l4:1
   OS=Linux 6.1.0-28-amd64 #1 SMP PREEMPT_DYNAMIC Debian 6.1.119-1 (2024-11-22)
| NVIDIA-SMI 570.133.20             Driver Version: 570.133.20     CUDA Version: 12.8     |
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off |                    0 |
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5e3ba2ad-0c9f-4f0d-9a5c-2b1f3a7d8e90)
  MIG 1g.10gb     Device  0: (UUID: MIG-41b3359c-e721-56e5-8009-12e5797ed514)
GPU0\t X \tNV18\tNV18\tSYS\t0-51,104-155\t0\t\tN/A
slurm-slurmd 22.05.9-1.el9
nvidia-cublas-cu12==12.8.4.1 --hash=sha256:8ac4e771d5a348c551b2a426eda6193c19aa630236b418086020df5ba9667142
nvidia_cudnn_cu12-9.8.0.87-py3-none-manylinux_2_27_x86_64.whl pypi-attestations-0.0.27.tar.gz
PWD=/root/clusterctl OLDPWD=/root
LD_LIBRARY_PATH=/usr/local/cuda/lib64:/usr/lib64/openmpi/lib
shared_storage_path: /shared
TASK [munge : key] bypass: true
/usr/share/NetworkManager/VPN/Projects2026/Cluster/NodeConfiguration
projects/my-project/zones/us-central1-a/instances/demo-train-1
kernel: Loaded X.509 cert 'Rocky kernel signing key: 7b2d3c0e9f8a1b6c5d4e3f2a1b0c9d8e7f6a5b4c'
clusterctl 0.1.0 (commit e818c002d3ad3fc6d8b6b0b0e7a4b1c5f2d9a8e7)
wandb: Currently logged in as: ada
"""  # noqa: E501 - as they are printed
