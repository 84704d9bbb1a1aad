//! Certificates for a test, under the names that libnbd, nbdkit and QEMU look for.

use std::path::Path;

use super::{program, run};

/// Makes an authority in `folder`, and certificates from it for a server on localhost and a client.
pub fn make(folder: &Path) {
    std::fs::create_dir_all(folder).expect("a folder");
    certificate(
        folder,
        "ca",
        &["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"],
    );
    let names = "subjectAltName=DNS:localhost,IP:127.0.0.1";
    for (name, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        let usage = format!("extendedKeyUsage={usage}");
        certificate(folder, name, &["basicConstraints=critical,CA:FALSE", names, &usage]);
    }
}

fn certificate(folder: &Path, name: &str, extensions: &[&str]) {
    let mut command = program("openssl");
    command
        .current_dir(folder)
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
        ])
        .args(["-nodes", "-days", "30", "-subj", &format!("/CN=larder test {name}")])
        .args([
            "-keyout",
            &format!("{name}-key.pem"),
            "-out",
            &format!("{name}-cert.pem"),
        ]);
    if name != "ca" {
        command.args(["-CA", "ca-cert.pem", "-CAkey", "ca-key.pem"]);
    }
    for extension in extensions {
        command.args(["-addext", extension]);
    }
    run(&mut command);
}
