//! Errors of invalid command lines of `larder migrate`.

use std::io::Write;
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;

use crate::support::{larder_path, run_command, temp_dir_on_tmpfs};

/// Command lines and their errors. LONG is a path of 120 bytes, PORT a port in use, `taken` a socket with a listener,
/// and `stale` one without. The sockets with other names answer with something that is not QMP.
const WRONG: [(&str, &str); 60] = [
    (
        "send",
        "error: the following required arguments were not provided:\n  --listen <PATH>\n  --to <HOST[:PORT]>\n\nUsage: larder migrate send --listen <PATH> --to <HOST[:PORT]>",
    ),
    ("send --listen s", "error: the following required arguments were not provided:\n  --to <HOST[:PORT]>\n"),
    (
        "send --listen s --to 127.0.0.1:1",
        "larder: cannot connect to 127.0.0.1:1: Connection refused (os error 111); is 'larder migrate receive' listening there, and does a firewall allow the connection?",
    ),
    (
        "send --listen s --to 127.0.0.1:port",
        "error: invalid value '127.0.0.1:port' for '--to <HOST[:PORT]>': 'port' is not a port; give HOST or HOST:PORT, as in host2.example:4446 or [2001:db8::1]:4446",
    ),
    ("send --listen s --to nosuch.invalid:4446", "larder: nosuch.invalid:4446: no such host: "),
    (
        "send --listen s --to 192.0.2.1:4446",
        "larder: the memory would be sent over a network: give --tls DIR with certificates, or --insecure if everyone on that network may see and change the guest's memory",
    ),
    (
        "send --listen s --to [2001:db8::1]:4446",
        "larder: the memory would be sent over a network: give --tls DIR with certificates",
    ),
    (
        "send --listen taken --to 127.0.0.1:1",
        "larder: socket taken is in use: another process listens on it; choose another path, or stop that process",
    ),
    (
        "send --listen file --to 127.0.0.1:1",
        "larder: file exists and is not a socket; it was not changed: choose another path",
    ),
    (
        "send --listen /nosuch/s --to 127.0.0.1:1",
        "larder: cannot listen on /nosuch/s: No such file or directory (os error 2); its directory does not exist",
    ),
    (
        "send --listen LONG --to 127.0.0.1:1",
        " is 120 bytes long; the kernel accepts at most 107: choose a shorter one, for example in /run/larder",
    ),
    ("send --listen s --to 127.0.0.1:1 --lanes 65", "error: invalid value '65' for '--lanes <N>': 65 is not in 1..=64"),
    (
        "send --listen s --to 127.0.0.1:1 --bandwidth fast",
        "error: invalid value 'fast' for '--bandwidth <SIZE>': 'fast' is not a size: give a whole number and KiB, MiB, GiB or TiB, as in 64MiB",
    ),
    (
        "send --listen s --to 127.0.0.1:1 --tls /nosuch",
        "larder: cannot read certificates from /nosuch/ca-cert.pem: I/O error: No such file or directory (os error 2); --tls DIR must contain ca-cert.pem, client-cert.pem and client-key.pem",
    ),
    (
        "send --listen s --to 127.0.0.1:1 --tls . --peer 00",
        "error: invalid value '00' for '--peer <FINGERPRINT|NAME>': '00' is neither a fingerprint nor a name: give the output of 'openssl x509 -noout -fingerprint -sha256 -in CERTIFICATE', 64 hexadecimal digits",
    ),
    (
        "send --listen s --to 127.0.0.1:1 --tls . --insecure",
        "error: the argument '--tls <DIR>' cannot be used with '--insecure'",
    ),
    ("receive --listen 127.0.0.1:0", "error: the following required arguments were not provided:\n  --qmp <PATH>\n"),
    (
        "receive --listen 127.0.0.1:PORT --connect q",
        "larder: cannot listen on 127.0.0.1:PORT: Address already in use (os error 98)",
    ),
    (
        "receive --listen 0.0.0.0:0 --connect q",
        "larder: the memory would be sent over a network: give --tls DIR with certificates, or --insecure if everyone on that network may see and change the guest's memory",
    ),
    (
        "receive --listen [::]:0 --connect q",
        "larder: the memory would be sent over a network: give --tls DIR with certificates",
    ),
    (
        "receive --listen 192.0.2.1:1 --connect q --insecure",
        "larder: cannot listen on 192.0.2.1:1: Cannot assign requested address (os error 99)",
    ),
    (
        "receive --listen 127.0.0.1:22x --connect q",
        "error: invalid value '127.0.0.1:22x' for '--listen <ADDRESS[:PORT]>': '22x' is not a port; give ADDRESS:PORT, as in 0.0.0.0:4446 or [::]:4446",
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
        "larder: cannot read certificates from ./ca-cert.pem: I/O error: No such file or directory (os error 2); --tls DIR must contain ca-cert.pem, server-cert.pem and server-key.pem",
    ),
    (
        "send --listen s --to 4446",
        "error: invalid value '4446' for '--to <HOST[:PORT]>': '4446' is a number, not a host; give HOST or HOST:PORT",
    ),
    (
        "send --listen s --to 127.0.0.1:0",
        "error: invalid value '127.0.0.1:0' for '--to <HOST[:PORT]>': port 0 cannot be connected to; give HOST or HOST:PORT",
    ),
    (
        "send --listen s --to [::1",
        "error: invalid value '[::1' for '--to <HOST[:PORT]>': a ']' is missing; give HOST or HOST:PORT",
    ),
    (
        "send --listen s --to tcp:host2.example:4446",
        "error: invalid value 'tcp:host2.example:4446' for '--to <HOST[:PORT]>': 'tcp:host2.example' is not a host name; give HOST or HOST:PORT",
    ),
    ("send --listen s --to [::1]:1", "larder: cannot connect to [::1]:1: "),
    (
        "send --listen s --to 127.0.0.1:1 --bandwidth 1000",
        "error: invalid value '1000' for '--bandwidth <SIZE>': '1000' has no unit: give 1000MiB, 1000KiB or 1000B",
    ),
    (
        "send --listen s --to 127.0.0.1:1 --bandwidth 0",
        "error: invalid value '0' for '--bandwidth <SIZE>': nothing would be sent; omit the option for no limit",
    ),
    (
        "send --listen s --to 127.0.0.1:1 --cpu -1",
        "error: invalid value '-1' for '--cpu <PROCESSORS>': give processors from 0.01 to 1024, as in 1.5",
    ),
    (
        "send --listen s --to 127.0.0.1:1 --control file",
        "larder: file exists and is not a socket; it was not changed: choose another path",
    ),
    (
        "receive --listen 127.0.0.1:0 --connect q --control /nosuch/c",
        "larder: cannot listen on /nosuch/c: No such file or directory (os error 2); its directory does not exist",
    ),
    (
        "receive --listen nosuch.invalid:4446 --connect q",
        "larder: --listen nosuch.invalid:4446: this host has no such address: ",
    ),
    (
        "receive --listen 127.0.0.1:0 --connect q --user nobody.at.all",
        "larder: --user nobody.at.all: no such user; give a name, or the number of an existing user",
    ),
    ("receive --listen 127.0.0.1:0 --qmp q --user nobody", " cannot be used with '--"),
    (
        "receive --listen 127.0.0.1:0 --qmp file",
        "larder: cannot connect to QEMU's QMP socket file: Connection refused (os error 111); it is no socket: give the path of -qmp unix:PATH,server=on,wait=off",
    ),
    ("--to 127.0.0.1:1", "error: the following required arguments were not provided:\n  <VM>\n"),
    (
        "--qmp nosuch --to 127.0.0.1:1",
        "larder: cannot connect to QEMU's QMP socket nosuch: No such file or directory (os error 2); is it the path of -qmp unix:PATH,server=on,wait=off?",
    ),
    (
        "--qmp stale --to 127.0.0.1:1",
        "larder: cannot connect to QEMU's QMP socket stale: Connection refused (os error 111); no process listens there: has its QEMU exited?",
    ),
    ("--qmp LONG --to 127.0.0.1:1", "; the kernel takes at most 107 bytes for the path of a socket"),
    (
        "--qmp silent --to 127.0.0.1:1",
        "larder: QEMU does not answer at its QMP socket silent: does it have another client? It serves one at a time; give it a second socket with another -qmp",
    ),
    (
        "--qmp ssh --to 127.0.0.1:1",
        "larder: the data from the QMP socket ssh is no QMP: 'SSH-2.0-x'; is it the path of -qmp unix:PATH,server=on,wait=off?",
    ),
    ("--qmp json --to 127.0.0.1:1", "larder: the data from the QMP socket json is no QMP: '{\\\"a\\\":1}'; is it"),
    ("--qmp escape --to 127.0.0.1:1", "larder: the data from the QMP socket escape is no QMP: '\\u{1b}[2J'; is it"),
    ("--qmp q --to 127.0.0.1:1 --timeout 0", "error: invalid value '0' for '--timeout <SECONDS>': 0 is not in 1.."),
    (
        "--qmp q --to 127.0.0.1:1 --downtime 0",
        "error: invalid value '0' for '--downtime <MILLISECONDS>': 0 is not in 1..=2000000",
    ),
    (
        "nosuch.vm --to 127.0.0.1:1",
        "larder: /etc/larder/vms/nosuch.vm.toml: No such file or directory (os error 2); write one, or give the path of one with a / in it",
    ),
    ("../../etc/passwd --to 127.0.0.1:1", "larder: ../../etc/passwd: "),
    (
        "--take-back --qmp nosuch",
        "larder: cannot connect to QEMU's QMP socket nosuch: No such file or directory (os error 2)",
    ),
    (
        "--take-back --qmp nosuch --to 127.0.0.1:1",
        "error: the argument '--take-back' cannot be used with '--to <HOST[:PORT]>'",
    ),
    ("statsu web", "\n  tip: the subcommands are send, receive, status, limit and cancel\n"),
    ("status nosuch", "larder: nosuch is not being moved by this user on this host: no process listens on "),
    ("status ./file", "larder: ./file is not a socket; give the path that the server was given with --control"),
    ("status a\u{1b}[2J", "larder: a\\u001b[2J is not being moved by this user on this host"),
    (
        "limit nosuch --bandwidth 1000",
        "error: invalid value '1000' for '--bandwidth <SIZE>': '1000' has no unit: give 1000MiB, 1000KiB or 1000B, or 0 for no limit",
    ),
    (
        "limit nosuch",
        "error: the following required arguments were not provided:\n  <--bandwidth <SIZE>|--cpu <PROCESSORS>|--downtime <MILLISECONDS>|--timeout <SECONDS>>",
    ),
    ("cancel ./ssh", "not a control socket of Larder"),
];

#[test]
fn full_monitor_backlog_is_not_awaited() {
    let folder = temp_dir_on_tmpfs();
    let path = folder.path().join("q");
    let listener = UnixListener::bind(&path).expect("a socket");
    // With a full backlog, a further client would block until a connection is accepted.
    rustix::net::listen(&listener, 0).expect("so few may wait");
    let _waits = UnixStream::connect(&path).expect("it may wait");
    for line in ["--to 127.0.0.1:1", "--take-back", "receive --listen 127.0.0.1:0"] {
        let mut command = Command::new(larder_path());
        command.arg("migrate").args(line.split(' ')).arg("--qmp").arg(&path);
        let (code, said) = run_command(command);
        assert!(code == Some(2) && said.contains("does it have another client?"), "{line}: {said}");
    }
}

/// Listens, and sends `said` to each client.
fn says(folder: &Path, name: &str, said: &'static [u8]) {
    let listener = UnixListener::bind(folder.join(name)).expect("a socket");
    std::thread::spawn(move || {
        let mut clients = Vec::new();
        for mut client in listener.incoming().flatten() {
            // The client may have disconnected.
            let _ = client.write_all(said);
            clients.push(client);
        }
    });
}

#[test]
fn invalid_command_lines_are_explained() {
    let folder = temp_dir_on_tmpfs();
    std::fs::write(folder.path().join("file"), "").expect("a file");
    let _taken = UnixListener::bind(folder.path().join("taken")).expect("a socket");
    drop(UnixListener::bind(folder.path().join("stale")).expect("a socket"));
    says(folder.path(), "silent", b"");
    says(folder.path(), "ssh", b"SSH-2.0-x\r\n");
    says(folder.path(), "json", b"{\"a\":1}\n");
    says(folder.path(), "escape", b"\x1b[2J\n");
    let port = TcpListener::bind("127.0.0.1:0").expect("a port");
    let number = port.local_addr().expect("bound").port().to_string();
    for (line, text) in WRONG {
        let filled = |text: &str| text.replace("LONG", &"a".repeat(120)).replace("PORT", &number);
        // The word PORT is also part of the usage message.
        let wanted = if line.contains(":PORT") { filled(text) } else { text.to_owned() };
        let mut command = Command::new(larder_path());
        command.current_dir(folder.path()).arg("migrate").args(filled(line).split(' '));
        let (code, said) = run_command(command);
        assert!(code == Some(2) && said.contains(&wanted), "{line}: {code:?} {said}");
        assert!(!folder.path().join("s").exists(), "{line}: a socket is left");
    }
}
