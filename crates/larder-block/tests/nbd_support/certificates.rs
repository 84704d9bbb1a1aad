//! Certificates for the tests of all crates, under the names that libnbd, nbdkit, QEMU and Larder use: `ca-cert.pem`,
//! `server-cert.pem`, `client-cert.pem`, and their keys in the same directory.

use std::path::Path;
use std::process::Command;

/// Creates an authority in `folder`, and certificates from it for a server on localhost and a client.
pub fn make(folder: &Path) {
    std::fs::create_dir_all(folder).expect("a folder");
    authority(folder);
    sign(folder, "server", "serverAuth", LOCALHOST);
    sign(folder, "client", "clientAuth", LOCALHOST);
}

/// The names of this host in a certificate.
pub const LOCALHOST: &str = "DNS:localhost,IP:127.0.0.1";

/// Creates an authority in `folder`; no two have the same name.
pub fn authority(folder: &Path) {
    let root = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"];
    certificate(folder, "ca", None, &root);
}

/// Creates a certificate of the authority in `folder`: `usage` is `serverAuth` or `clientAuth`, `names` are as in
/// [`LOCALHOST`].
pub fn sign(folder: &Path, name: &str, usage: &str, names: &str) {
    let (usage, names) = (format!("extendedKeyUsage={usage}"), format!("subjectAltName={names}"));
    certificate(folder, name, Some("ca"), &["basicConstraints=critical,CA:FALSE", &usage, &names]);
}

/// Creates another certificate of the authority in `folder` for an existing key.
#[allow(dead_code, reason = "not every crate's tests renew one")]
pub fn renew(folder: &Path, name: &str, usage: &str, names: &str) {
    let text = format!("extendedKeyUsage={usage}\nsubjectAltName={names}\nbasicConstraints=critical,CA:FALSE\n");
    std::fs::write(folder.join("extensions"), text).expect("a file");
    let script = format!(
        "openssl req -new -key {name}-key.pem -subj '/CN=larder test {name} renewed' | \
         openssl x509 -req -days 30 -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -extfile extensions -out {name}-cert.pem"
    );
    let output = Command::new("sh").current_dir(folder).args(["-c", &script]).output();
    let output = output.expect("a shell");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Creates a self-signed certificate.
pub fn alone(folder: &Path, name: &str, names: &str) {
    let names = format!("subjectAltName={names}");
    certificate(folder, name, None, &["basicConstraints=critical,CA:FALSE", &names]);
}

fn certificate(folder: &Path, name: &str, authority: Option<&str>, extensions: &[&str]) {
    let file = |of: &str, part: &str| format!("{of}-{part}.pem");
    let place = folder.file_name().expect("a folder").to_string_lossy();
    let mut command = Command::new("openssl");
    command.current_dir(folder);
    command.args(["req", "-x509", "-nodes", "-days", "30", "-newkey", "ec"]);
    command.args(["-pkeyopt", "ec_paramgen_curve:P-256"]);
    command.args(["-subj", &format!("/CN=larder test {name} {place}")]);
    command.args(["-keyout", &file(name, "key"), "-out", &file(name, "cert")]);
    if let Some(authority) = authority {
        command.args(["-CA", &file(authority, "cert"), "-CAkey", &file(authority, "key")]);
    }
    for extension in extensions {
        command.args(["-addext", extension]);
    }
    let output = command.output().expect("openssl; testbed/setup.sh installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
