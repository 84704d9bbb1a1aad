//! Access control of `larder host`, and limits on hostile clients.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use super::support::{TEST_TIMEOUT, certificates, run_command, run_tool, temp_dir_on_tmpfs};
use super::{User, text};

const TOKEN: &str = "b4d9b9a1f7c24f5e";

/// Creates a directory with a certificate for this host, and a token.
fn pki(user: &User) -> TempDir {
    let folder = temp_dir_on_tmpfs();
    let path = |name: &str| folder.path().join(name);
    certificates::alone(folder.path(), "server", certificates::LOCALHOST);
    std::fs::write(path("token"), format!("{TOKEN}\n")).expect("writes");
    for (name, mode) in [("server-key.pem", 0o600), ("server-cert.pem", 0o644), ("token", 0o600), (".", 0o755)] {
        std::fs::set_permissions(path(name), PermissionsExt::from_mode(mode)).expect("ours");
        user.own(&path(name));
    }
    folder
}

fn refused(user: &User, options: &[&str], words: &[&str]) {
    let (code, said) = run_command(user.larder(&[&["host"], options].concat()));
    assert_eq!(code, Some(2), "{options:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{options:?}: nothing of {word}: {said}");
    }
}

#[test]
fn remote_access_needs_tls_and_token() {
    let user = User::new();
    let pki = pki(&user);
    let (certificates, token) = (text(pki.path()), pki.path().join("token"));
    let token = text(&token);
    let both = ["the token would cross the network", "--tls-certificates", "ssh -L"];
    for listen in ["0.0.0.0:0", "[::]:0", "192.0.2.1:9178"] {
        refused(&user, &["--listen", listen], &both);
        refused(&user, &["--listen", listen, "--token-file", token], &both);
    }
    for (options, words) in [
        (&["--listen", "nowhere"][..], &["127.0.0.1:9178", "unix socket"][..]),
        (
            &["--listen", "/nowhere/s.sock", "--tls-certificates", certificates],
            &["/nowhere/s.sock", "a unix socket has no TLS"],
        ),
        (&["--listen", "/nowhere/s.sock"], &["/nowhere/s.sock", "its directory does not exist"]),
        (&["--listen", "127.0.0.1:0", "--socket-mode", "0660"], &["--socket-mode", "unix socket"]),
        (&["--listen", "./s.sock", "--socket-mode", "0060"], &["at least 0600"]),
        (&["--listen", "./s.sock", "--socket-group", "no-such"], &["there is no group 'no-such'"]),
    ] {
        refused(&user, options, words);
    }
    let of_token =
        |path: &str, words: &[&str]| refused(&user, &["--listen", "127.0.0.1:0", "--token-file", path], words);
    of_token("/nowhere/token", &["/nowhere/token", "No such file"]);
    std::fs::set_permissions(Path::new(token), PermissionsExt::from_mode(0o644)).expect("ours");
    of_token(token, &["every user of this host", "chmod"]);
    std::fs::set_permissions(Path::new(token), PermissionsExt::from_mode(0o600)).expect("ours");
    std::fs::write(token, "short\n").expect("writes");
    of_token(token, &["16 printable characters", "openssl rand"]);
    refused(&user, &["--tls-certificates", "/nowhere"], &["/nowhere/server-cert.pem"]);
    let host = user.host(&[]);
    refused(&user, &["--listen", &host.address.to_string()], &["cannot listen on", "Address already in use"]);
}

#[test]
fn tls_clients_need_the_token() {
    let user = User::new();
    let pki = pki(&user);
    let token = pki.path().join("token");
    let mut command = user.larder(&["host", "--listen", "0.0.0.0:0", "--tls-certificates", text(pki.path())]);
    command.args(["--token-file", text(&token)]);
    let process = larder_bench::campaign::process::Process::start(command).expect("starts");
    let line = process.wait_for(" ready ", TEST_TIMEOUT).expect("listens");
    let port = line.split("0.0.0.0:").nth(1).and_then(|rest| rest.split('/').next()).expect("a port").to_owned();
    let url = |path: &str| format!("https://localhost:{port}{path}");
    let certificate = pki.path().join("server-cert.pem");
    let curl = |path: &str, options: &[&str]| {
        let url = url(path);
        let all = [&["-sS", "--include", "--cacert", text(&certificate)], options, &[&url]].concat();
        run_tool("curl", &all)
    };
    for path in ["/", "/metrics", "/api/fleet", "/api/vm/web", "/nothing"] {
        for options in
            [&[][..], &["-H", "Authorization: Bearer b4d9b9a1f7c24f5f"], &["-H", "Cookie: larder-host-00000000=00"]]
        {
            let said = curl(path, options);
            assert!(said.starts_with("HTTP/1.1 401 "), "{path}: {said}");
            assert!(said.contains("www-authenticate: Bearer"), "{said}");
        }
    }
    let browser = ["-H", "Accept: text/html"];
    let said = curl("/", &browser);
    assert!(said.starts_with("HTTP/1.1 303 ") && said.contains("location: /login"), "{said}");
    assert!(curl("/login", &browser).contains("<form method=\"post\""));
    assert!(curl("/assets/style.css", &[]).starts_with("HTTP/1.1 200 "));
    let bearer = format!("Authorization: Bearer {TOKEN}");
    assert!(curl("/metrics", &["-H", &bearer]).contains("larder_build_info{version="));
    let wrong = curl("/login", &["--data", "token=b4d9b9a1f7c24f5"]);
    assert!(wrong.contains("location: /login#wrong") && !wrong.contains("set-cookie"), "{wrong}");
    let right = curl("/login", &["--data", &format!("token={TOKEN}")]);
    let cookie = right.lines().find_map(|line| line.strip_prefix("set-cookie: ")).expect("a cookie");
    for word in ["HttpOnly", "SameSite=Strict", "Secure", "Path=/"] {
        assert!(cookie.contains(word), "nothing of {word}: {cookie}");
    }
    assert!(!cookie.contains(TOKEN), "{cookie}");
    let cookie = format!("Cookie: {}", cookie.split(';').next().expect("its value"));
    assert!(curl("/", &["-H", &cookie]).starts_with("HTTP/1.1 200 "));
    // A client without TLS gets nothing.
    let mut plain = TcpStream::connect(format!("127.0.0.1:{port}")).expect("connects");
    plain.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("takes it");
    let mut said = Vec::new();
    let _ = plain.read_to_end(&mut said);
    assert!(!String::from_utf8_lossy(&said).contains("HTTP/1.1 200"));
}

/// A request with another site's name in `Host` is refused, before its token is checked.
#[test]
fn foreign_host_header_is_refused() {
    let user = User::new();
    let host = user.host(&[]);
    let token = host.authorization();
    let ask =
        |head: &str| host.send(format!("GET /metrics HTTP/1.1\r\n{head}{token}Connection: close\r\n\r\n").as_bytes());
    for own in ["Host: localhost:1\r\n", "Host: 127.0.0.1\r\n", "Host: [::1]:9178\r\n"] {
        assert!(ask(own).starts_with("HTTP/1.1 200 "), "{own}");
    }
    for other in
        ["Host: evil.example\r\n", "Host: localhost.evil.example\r\n", "", "Host: localhost\r\nHost: localhost\r\n"]
    {
        let said = ask(other);
        assert!(said.starts_with("HTTP/1.1 421 ") && !said.contains("larder_"), "{other}: {said}");
    }
}

/// A client on loopback without the token gets no data, and only the user of `larder host` can read the token's file.
#[test]
fn loopback_needs_the_token() {
    let user = User::new();
    let _web = user.vm("web");
    let host = user.host(&[]);
    let file = user.token_file();
    let told = host.process.output();
    assert!(told.contains(&format!("token_file=\"{}\"", text(&file))), "{told}");
    assert!(!told.contains(&host.token), "the log has the token: {told}");
    let mode = file.metadata().expect("is there").permissions().mode();
    assert_eq!((mode & 0o777, host.token.len()), (0o600, 64));
    let ask = |path: &str, headers: &str| {
        host.send(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n").as_bytes())
    };
    let wrong = format!("Authorization: Bearer {}\r\n", "0".repeat(64));
    for path in ["/", "/metrics", "/api/fleet", "/api/vm/web", "/api/migration/web.leaving", "/nothing"] {
        for headers in ["", &wrong, "Cookie: larder-host-00000000=00\r\n"] {
            let said = ask(path, headers);
            assert!(said.starts_with("HTTP/1.1 401 "), "{path}: {said}");
            assert!(said.contains("www-authenticate: Bearer") && said.contains("token_file"), "{said}");
            assert!(!said.contains("larder_") && !said.contains("\"web\""), "{path}: {said}");
        }
    }
    assert!(host.metrics().contains(r#"larder_vm_up{domain="web"} 1"#));
    // A browser gets a cookie for the token, which becomes invalid with a new token.
    let form = format!("token={}", host.token);
    let right = host.send(
        format!(
            "POST /login HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{form}",
            form.len()
        )
        .as_bytes(),
    );
    let cookie = right
        .lines()
        .find_map(|line| line.strip_prefix("set-cookie: "))
        .unwrap_or_else(|| panic!("no cookie: {right}"));
    assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
    let cookie = format!("Cookie: {}\r\n", cookie.split(';').next().expect("its value"));
    assert!(ask("/", &cookie).starts_with("HTTP/1.1 200 "));
    // A second process uses the same token.
    assert_eq!(user.host(&[]).token, host.token);
    std::fs::remove_file(&file).expect("is ours");
    let other = user.host(&[]);
    assert_ne!(other.token, host.token);
    assert!(other.get("/", &[]).0.starts_with("HTTP/1.1 200 "));
    let said = other.send(format!("GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{cookie}\r\n").as_bytes());
    assert!(said.starts_with("HTTP/1.1 401 "), "{said}");
}

/// The mode of a unix socket decides which users can connect; a wrong Host header is refused there too.
#[test]
fn unix_socket_mode_replaces_the_token() {
    let user = User::new();
    let _web = user.vm("web");
    // The socket is among the VMs' sockets, and must not be taken for one.
    let path = user.socket("host.sock");
    let start = |options: &[&str]| {
        let all = [&["host", "--listen", text(&path)], options].concat();
        let process = larder_bench::campaign::process::Process::start(user.larder(&all)).expect("starts");
        let line = process.wait_for(" ready ", TEST_TIMEOUT).expect("listens");
        assert!(line.contains(text(&path)), "{line}");
        process
    };
    let curl = |options: &[&str]| {
        let all = [&["-sS", "--include", "--unix-socket", text(&path)], options].concat();
        run_tool("curl", &all)
    };
    let mode = || path.metadata().expect("is there").permissions().mode() & 0o777;
    let mut process = start(&[]);
    assert_eq!(mode(), 0o600);
    assert!(!user.token_file().exists(), "nobody needs one");
    let metrics = curl(&["http://localhost/metrics"]);
    assert!(metrics.contains(r#"larder_vm_up{domain="web"} 1"#), "{metrics}");
    assert!(metrics.contains("larder_host_sockets{state=\"foreign\"} 0"), "{metrics}");
    let other = curl(&["http://evil.example/metrics"]);
    assert!(other.starts_with("HTTP/1.1 421 ") && !other.contains("larder_"), "{other}");
    process.signal(libc::SIGTERM);
    assert!(process.wait(TEST_TIMEOUT).expect("ends").success());
    assert!(!path.exists(), "its socket is left");
    // The socket of a killed process is replaced.
    start(&[]).kill();
    assert!(path.exists());
    let pki = pki(&user);
    let token = pki.path().join("token");
    let _process = start(&["--socket-mode", "0666", "--token-file", text(&token)]);
    assert_eq!(mode(), 0o666);
    assert!(curl(&["http://localhost/metrics"]).starts_with("HTTP/1.1 401 "));
    let bearer = format!("Authorization: Bearer {TOKEN}");
    assert!(curl(&["-H", &bearer, "http://localhost/metrics"]).starts_with("HTTP/1.1 200 "));
}

/// Methods that could change something get 405, pages have the security headers, and unknown paths get 404.
#[test]
fn host_rejects_changes_and_secures_pages() {
    let user = User::new();
    let host = user.host(&[]);
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        let token = host.authorization();
        let request =
            format!("{method} / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n{token}\r\n");
        assert!(host.send(request.as_bytes()).starts_with("HTTP/1.1 405 "), "{method}");
    }
    for path in ["/", "/assets/main.js", "/assets/vendor/uPlot.esm.js"] {
        let (head, body) = host.get(path, &[]);
        assert!(head.starts_with("HTTP/1.1 200 ") && !body.is_empty(), "{path}: {head}");
        for header in ["content-security-policy: default-src 'self'; ", "x-content-type-options: nosniff"] {
            assert!(head.contains(header), "{path}: nothing of {header}: {head}");
        }
    }
    for path in ["/nothing", "/assets/../Cargo.toml", "/api/vm/%zz"] {
        assert!(host.get(path, &[]).0.starts_with("HTTP/1.1 404 "), "{path}");
    }
}

#[test]
fn hostile_clients_do_not_block_others() {
    let user = User::new();
    let _web = user.vm("web");
    let host = user.host(&[]);
    let silent: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(host.address).expect("connects")).collect();
    assert!(host.metrics().contains("larder_vm_up"));
    let mut half: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(host.address).expect("connects")).collect();
    half.iter_mut().for_each(|client| drop(client.write_all(b"GET /metrics HTTP/1.1\r\nHost: loc")));
    // These clients request a lot and read nothing.
    let greedy = b"GET /assets/vendor/uPlot.esm.js HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(500);
    let mut deaf: Vec<TcpStream> = (0..50).map(|_| TcpStream::connect(host.address).expect("connects")).collect();
    for client in &mut deaf {
        client.set_nonblocking(true).expect("can be set");
        let _ = client.write(&greedy);
    }
    assert!(host.metrics().contains("larder_vm_up"));
    let long = format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(64 << 10));
    assert!(host.send(long.as_bytes()).starts_with("HTTP/1.1 431 "));
    assert!(host.send(b"\x16\x03\x01 no HTTP\r\n\r\n").starts_with("HTTP/1.1 400 "));
    // The maximum number of subscribers.
    let watching: Vec<_> = (0..64).map(|_| host.follow("/api/fleet")).collect();
    super::until("a place is denied", || {
        let (head, _) = host.get("/api/fleet", &["Range: bytes=0-0"]);
        head.starts_with("HTTP/1.1 503 ").then_some(())
    });
    assert!(host.metrics().contains("larder_vm_up"));
    drop((silent, half, deaf, watching));
    super::until("a place", || {
        let mut client = TcpStream::connect(host.address).ok()?;
        client.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        client
            .write_all(format!("GET /api/fleet HTTP/1.0\r\nHost: localhost\r\n{}\r\n", host.authorization()).as_bytes())
            .ok()?;
        let mut head = [0; 12];
        client.read_exact(&mut head).ok()?;
        (&head == b"HTTP/1.0 200").then_some(())
    });
}
