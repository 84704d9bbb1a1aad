//! What is said of command lines that cannot be.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::process::Command;

use crate::support::{larder, on_tmpfs, run};

/// A command line, and what is said of it. LONG is a path of 120 bytes, PORT a port that is taken, and `taken` a socket that
/// somebody listens on.
const WRONG: [(&str, &str); 25] = [
    (
        "send",
        "error: the following required arguments were not provided:\n  --listen <PATH>\n  --to <HOST:PORT>\n\nUsage: larder migrate send --listen <PATH> --to <HOST:PORT>",
    ),
    (
        "send --listen s",
        "error: the following required arguments were not provided:\n  --to <HOST:PORT>\n",
    ),
    (
        "send --listen s --to 127.0.0.1:1",
        "larder: cannot connect to 127.0.0.1:1: Connection refused (os error 111); does 'larder migrate receive' listen there, and does a firewall let it?",
    ),
    (
        "send --listen s --to 127.0.0.1:port",
        "larder: 127.0.0.1:port: no such host: invalid port value",
    ),
    (
        "send --listen s --to nosuch.invalid:4446",
        "larder: nosuch.invalid:4446: no such host: ",
    ),
    (
        "send --listen s --to 192.0.2.1:4446",
        "larder: this goes over a network: give --tls DIR with certificates, or --insecure if whoever can listen there may see and change the guest's memory",
    ),
    (
        "send --listen s --to [2001:db8::1]:4446",
        "larder: this goes over a network: give --tls DIR with certificates",
    ),
    (
        "send --listen taken --to 127.0.0.1:1",
        "larder: socket taken is taken: another process listens on it; choose another path, or stop that process",
    ),
    (
        "send --listen file --to 127.0.0.1:1",
        "larder: file exists and is no socket; it is left alone: choose another path",
    ),
    (
        "send --listen /nosuch/s --to 127.0.0.1:1",
        "larder: cannot listen on /nosuch/s: No such file or directory (os error 2); its folder does not exist",
    ),
    (
        "send --listen LONG --to 127.0.0.1:1",
        " is 120 bytes long; the kernel takes at most 107: choose a shorter one, for example in /run/larder",
    ),
    (
        "send --listen s --to 127.0.0.1:1 --lanes 65",
        "error: invalid value '65' for '--lanes <N>': 65 is not in 1..=64",
    ),
    (
        "send --listen s --to 127.0.0.1:1 --bandwidth fast",
        "error: invalid value 'fast' for '--bandwidth <SIZE>': 'fast' is not a size: give a whole number and KiB, MiB, GiB or TiB, as in 64MiB",
    ),
    (
        "send --listen s --to 127.0.0.1:1 --tls /nosuch",
        "larder: cannot read certificates from /nosuch/ca-cert.pem: I/O error: No such file or directory (os error 2)",
    ),
    (
        "send --listen s --to 127.0.0.1:1 --tls . --peer 00",
        "error: invalid value '00' for '--peer <FINGERPRINT>': '00' is no fingerprint: it is what 'openssl x509 -noout -fingerprint -sha256 -in CERTIFICATE' says, 64 hexadecimal digits, with or without colons",
    ),
    (
        "send --listen s --to 127.0.0.1:1 --tls . --insecure",
        "error: the argument '--tls <DIR>' cannot be used with '--insecure'",
    ),
    (
        "receive --listen 127.0.0.1:0",
        "error: the following required arguments were not provided:\n  --qmp <PATH>\n",
    ),
    (
        "receive --listen 127.0.0.1:PORT --connect q",
        "larder: cannot listen on 127.0.0.1:PORT: Address already in use (os error 98)",
    ),
    (
        "receive --listen 0.0.0.0:0 --connect q",
        "larder: this goes over a network: give --tls DIR with certificates, or --insecure if whoever can listen there may see and change the guest's memory",
    ),
    (
        "receive --listen [::]:0 --connect q",
        "larder: this goes over a network: give --tls DIR with certificates",
    ),
    (
        "receive --listen 192.0.2.1:1 --connect q --insecure",
        "larder: cannot listen on 192.0.2.1:1: Cannot assign requested address (os error 99)",
    ),
    (
        "receive --listen 127.0.0.1:22x --connect q",
        "larder: --listen 127.0.0.1:22x: ADDRESS:PORT is wanted, such as 0.0.0.0:4446: invalid port value",
    ),
    (
        "receive --listen 127.0.0.1:0 --connect q --channels 0",
        "error: invalid value '0' for '--channels <N>': 0 is not in 1..=256",
    ),
    (
        "receive --listen 127.0.0.1:0 --connect LONG",
        " is 120 bytes long; the kernel takes at most 107: start QEMU with a shorter one, for example in /run",
    ),
    (
        "receive --listen 127.0.0.1:0 --connect q --tls .",
        "larder: cannot read certificates from ./ca-cert.pem: I/O error: No such file or directory (os error 2)",
    ),
];

#[test]
fn command_lines_that_cannot_be_are_refused_with_what_is_wrong() {
    let folder = on_tmpfs();
    std::fs::write(folder.path().join("file"), "").expect("a file");
    let _taken = UnixListener::bind(folder.path().join("taken")).expect("a socket");
    let port = TcpListener::bind("127.0.0.1:0").expect("a port");
    let number = port.local_addr().expect("bound").port().to_string();
    for (line, text) in WRONG {
        let filled = |text: &str| text.replace("LONG", &"a".repeat(120)).replace("PORT", &number);
        // The word is one of the usage, too.
        let wanted = if line.contains(":PORT") {
            filled(text)
        } else {
            text.to_owned()
        };
        let mut command = Command::new(larder());
        command
            .current_dir(folder.path())
            .arg("migrate")
            .args(filled(line).split(' '));
        let (code, said) = run(command);
        assert!(code == Some(2) && said.contains(&wanted), "{line}: {code:?} {said}");
        assert!(!folder.path().join("s").exists(), "{line}: a socket is left");
    }
}
