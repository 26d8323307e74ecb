"""Keys and certificates for servers of this machine: an authority made in milliseconds, and what it signs."""

import datetime
import ipaddress
import os
import pathlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
  """Signs certificates for 127.0.0.1 and writes them as PEM files."""

  def __init__(self, folder: pathlib.Path, name: str = "ca"):
    self._folder = folder
    self._key = ec.generate_private_key(ec.SECP256R1())
    self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {name}")])
    self._certificate = self._sign(self._name, self._key, is_ca=True, days=(-1, 10))
    self.file = folder / f"{name}.pem"
    self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

  def issue(
    self, name: str, days: tuple[int, int] = (-1, 10), host: str = "localhost"
  ) -> tuple[pathlib.Path, pathlib.Path]:
    """Certificate and key files, `name`.pem and `name`.key, valid from and until these days from now.

    They are for `host`, a name or an address, and for 127.0.0.1 unless it is another name than localhost.

    Files of the same name are replaced by renaming, as a careful operator would.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = self._sign(subject, key, is_ca=False, days=days, host=host)
    cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
    replace_file(cert_file, certificate.public_bytes(serialization.Encoding.PEM))
    replace_file(
      key_file,
      key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    return cert_file, key_file

  def _sign(self, subject, key, *, is_ca: bool, days: tuple[int, int], host: str = "") -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
      x509.CertificateBuilder()
      .subject_name(subject)
      .issuer_name(self._name)
      .public_key(key.public_key())
      .serial_number(x509.random_serial_number())
      .not_valid_before(now + datetime.timedelta(days=days[0]))
      .not_valid_after(now + datetime.timedelta(days=days[1]))
      .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    )
    if not is_ca:
      names: list[x509.GeneralName] = [x509.DNSName(host)]
      is_address = host.replace(".", "").isdigit()
      if host == "localhost" or is_address:
        names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
      if is_address:
        names.append(x509.IPAddress(ipaddress.ip_address(host)))
      builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(self._key, hashes.SHA256())


def replace_file(path: pathlib.Path, content: bytes) -> None:
  """Private, and another file in the same place."""
  part = path.with_name(path.name + ".part")
  part.unlink(missing_ok=True)
  with open(os.open(part, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
    file.write(content)
  part.replace(path)
