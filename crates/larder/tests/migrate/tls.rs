//! TLS: authentication of sender and receiver.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use larder_bench::campaign::migration::relay::{Tamper, Way};
use tempfile::TempDir;

use crate::ends::{Waiting, carries};
use crate::support::{TEST_TIMEOUT, certificates, run_command, temp_dir_on_tmpfs};

/// A certificate authority, with certificates for a sender and for receivers.
pub(crate) struct Authority(TempDir);

impl Authority {
    pub(crate) fn new() -> Self {
        let this = Self(temp_dir_on_tmpfs());
        certificates::authority(this.0.path());
        this.sign("client", "clientAuth", "DNS:source.example");
        this.sign("server", "serverAuth", certificates::LOCALHOST);
        this
    }

    fn sign(&self, name: &str, usage: &str, names: &str) {
        certificates::sign(self.0.path(), name, usage, names);
    }

    /// Signs the key of that name once more.
    fn renew(&self, name: &str, usage: &str, names: &str) {
        let key = self.0.path().join(format!("{name}-key.pem"));
        let kept = std::fs::read(&key).expect("a key");
        certificates::renew(self.0.path(), name, usage, names);
        assert!(std::fs::read(&key).expect("a key") == kept, "it has another key");
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }

    pub(crate) fn words(&self) -> [&str; 2] {
        ["--tls", self.0.path().to_str().expect("UTF-8")]
    }

    fn fingerprint(&self, name: &str) -> String {
        let mut command = Command::new("openssl");
        command.current_dir(self.0.path());
        command.args(["x509", "-noout", "-fingerprint", "-sha256", "-in", &format!("{name}-cert.pem")]);
        let said = succeed(command);
        said.trim().rsplit('=').next().expect("sha256 Fingerprint=...").to_owned()
    }

    /// Replaces the certificate of that name by one of another authority.
    fn with(self, other: &Self, name: &str) -> Self {
        for part in ["cert", "key"] {
            let file = format!("{name}-{part}.pem");
            std::fs::copy(other.path().join(&file), self.path().join(&file)).expect("a copy");
        }
        self
    }

    /// Copies the files to another directory, as of a host that remembers no other one.
    pub(crate) fn copy(&self) -> Self {
        let copy = Self(temp_dir_on_tmpfs());
        for entry in std::fs::read_dir(self.0.path()).expect("a folder").flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_file()) {
                std::fs::copy(entry.path(), copy.path().join(entry.file_name())).expect("a copy");
            }
        }
        copy
    }

    /// Returns the SHA-256 of the public key of the certificate of that name, as openssl prints it.
    pub(crate) fn key(&self, name: &str) -> String {
        let command = format!(
            "openssl x509 -in {name}-cert.pem -noout -pubkey | openssl pkey -pubin -outform der | sha256sum | cut -d' ' -f1"
        );
        let mut shell = Command::new("sh");
        shell.current_dir(self.0.path()).args(["-c", &command]);
        succeed(shell).trim().to_owned()
    }

    /// Returns the file of the remembered hosts: `senders` or `receivers`.
    fn remembered(&self, which: &str) -> PathBuf {
        self.0.path().join("state/migrate").join(which)
    }
}

fn succeed(mut command: Command) -> String {
    let output = command.output().expect("openssl; testbed/setup.sh installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Asserts that a sender is refused, that both sides report the reason, and that QEMU gets no connection; then the
/// right sender succeeds.
fn refused([sender, receiver]: [&[&str]; 2], [by_sender, by_receiver]: [&str; 2], right: &[&str]) {
    let waiting = Waiting::start(receiver);
    let said = waiting.refuses(sender);
    assert!(said.contains(by_sender), "not '{by_sender}', but:\n{said}");
    waiting.receiver.process.wait_for(by_receiver, TEST_TIMEOUT).expect("it says so");
    assert!(waiting.is_untouched());
    carries(&mut waiting.joined(right), 200);
}

/// Records the data that passes, to search it for plain text.
struct Eavesdropper(Arc<Mutex<Vec<u8>>>);

impl Tamper for Eavesdropper {
    fn pass(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> bool {
        self.0.lock().expect("whole").extend_from_slice(bytes);
        out.extend_from_slice(bytes);
        true
    }
}

#[test]
fn tls_session_shows_no_plaintext() {
    let authority = Authority::new();
    let words = authority.words();
    let heard: Arc<Mutex<Vec<u8>>> = Arc::default();
    let tap = Arc::clone(&heard);
    let tamper = move |_, _: Way| Some(Box::new(Eavesdropper(Arc::clone(&tap))) as Box<dyn Tamper>);
    let mut between = Waiting::start(&words).joined_by(&words, tamper);
    carries(&mut between, 2000);
    let heard = heard.lock().expect("whole");
    for shown in [&b"LARDMIG"[..], b"LFRM", b"pc.ram", &[1; 100]] {
        assert!(!heard.windows(shown.len()).any(|bytes| bytes == shown), "{shown:?}");
    }
}

#[test]
fn sender_of_other_authority_is_refused() {
    let (right, other) = (Authority::new(), Authority::new());
    let wrong = right.copy().with(&other, "client");
    refused(
        [&wrong.words(), &right.words()],
        [
            "does not accept this sender's certificate",
            "the TLS handshake failed: invalid peer certificate: UnknownIssuer",
        ],
        &right.words(),
    );
}

#[test]
fn sender_without_certificate_is_refused() {
    let right = Authority::new();
    let waiting = Waiting::start(&right.words());
    let mut command = Command::new("openssl");
    command.current_dir(right.path());
    command.args(["s_client", "-CAfile", "ca-cert.pem", "-verify_return_error", "-connect"]);
    command.arg(waiting.receiver.address().to_string());
    let (_, said) = run_command(command);
    assert!(said.contains("alert certificate required"), "{said}");
    let said = waiting.receiver.process.wait_for("the TLS handshake failed: peer sent no certificates", TEST_TIMEOUT);
    said.expect("it says so");
    carries(&mut waiting.joined(&right.words()), 200);
}

#[test]
fn receiver_of_other_authority_is_refused() {
    let (right, other) = (Authority::new(), Authority::new());
    let receiver = right.copy().with(&other, "server");
    let wants_other = right.copy();
    std::fs::copy(other.path().join("ca-cert.pem"), wants_other.path().join("ca-cert.pem")).expect("a copy");
    refused(
        [&right.words(), &receiver.words()],
        [
            "the TLS handshake failed: invalid peer certificate: UnknownIssuer",
            "the TLS handshake failed: received fatal alert",
        ],
        &wants_other.words(),
    );
}

#[test]
fn receiver_with_wrong_name_is_refused() {
    let right = Authority::new();
    let elsewhere = right.copy();
    elsewhere.sign("server", "serverAuth", "DNS:other.example");
    let waiting = Waiting::start(&elsewhere.words());
    let said = waiting.refuses(&right.words());
    assert!(said.contains("certificate not valid for name \"127.0.0.1\""), "{said}");
    let said = waiting.receiver.process.wait_for("the TLS handshake failed: received fatal alert", TEST_TIMEOUT);
    said.expect("it says so");
    assert!(waiting.is_untouched());
}

#[test]
fn only_given_fingerprints_are_accepted() {
    let right = Authority::new();
    let (server, client) = (right.fingerprint("server"), right.fingerprint("client"));
    let wrong = "00:".repeat(31) + "00";
    let [tls, folder] = right.words();
    let to_server = [tls, folder, "--peer", &wrong, "--peer", &server];
    let to_client = [tls, folder, "--peer", &client, "--peer", &wrong];
    let to_wrong = [tls, folder, "--peer", &wrong];
    let none = "which is none of the given ones";
    refused([&to_wrong, &to_client], [none, "the greeting of a sender: "], &to_server);
    let waiting = Waiting::start(&to_wrong);
    let said = waiting.refuses(&to_server);
    let hex = client.replace(':', "").to_lowercase();
    assert!(
        said.contains(&format!(
            "larder: the receiver refuses: the other side's certificate has the fingerprint {hex} (its public key: {}), {none}",
            right.key("client")
        )),
        "{said}"
    );
    waiting.receiver.process.wait_for(none, TEST_TIMEOUT).expect("it says so");
    assert!(waiting.is_untouched());
}

/// With TLS on one side only, both sides report that.
#[test]
fn one_sided_tls_fails_both_sides() {
    let right = Authority::new();
    refused(
        [&[], &right.words()],
        ["the other side speaks TLS: use --tls", "the sender does not speak TLS"],
        &right.words(),
    );
    refused([&right.words(), &[]], ["does the receiver have --tls?", "the other side speaks TLS: use --tls"], &[]);
}

/// Each side remembers the key of the other one at the first move, and accepts it at the next one.
#[test]
fn peers_are_remembered_at_first_use() {
    let source = Authority::new();
    let destination = source.copy();
    let keys = [destination.key("server"), source.key("client")];
    let files = [source.remembered("receivers"), destination.remembered("senders")];
    for is_first in [true, false] {
        let mut between = Waiting::start(&destination.words()).joined(&source.words());
        carries(&mut between, 200);
        for ((key, file), side) in keys.iter().zip(&files).zip([&between.sender, &between.receiver]) {
            let text = std::fs::read_to_string(file).expect("a file");
            let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
            assert_eq!(lines, [format!("127.0.0.1 {key}")]);
            let said = side.process.output();
            let told = format!("has the fingerprint {key}, which is recorded in {}", file.display());
            assert_eq!(said.contains(&told), is_first, "{said}");
        }
    }
}

/// A host that is remembered with another key is refused, with advice how to accept it; once accepted, it is
/// remembered.
#[test]
fn changed_certificate_is_refused_until_given() {
    let source = Authority::new();
    let destination = source.copy();
    carries(&mut Waiting::start(&destination.words()).joined(&source.words()), 200);
    // The receiver gets another key.
    let old = destination.key("server");
    destination.sign("server", "serverAuth", certificates::LOCALHOST);
    let new = destination.key("server");
    let file = source.remembered("receivers");
    let waiting = Waiting::start(&destination.words());
    let said = waiting.refuses(&source.words());
    let why = format!(
        "127.0.0.1 has shown a certificate with the public key {new}, and {}:2 has {old} for it. If that host has a new key, \
         give --peer {new} once, which replaces that line",
        file.display()
    );
    assert!(said.contains(&why), "{said}");
    assert!(waiting.is_untouched());
    let [tls, folder] = source.words();
    carries(&mut waiting.joined(&[tls, folder, "--peer", &new]), 200);
    // The new key is remembered from then on.
    carries(&mut Waiting::start(&destination.words()).joined(&source.words()), 200);
    // The sender gets another key.
    let old = source.key("client");
    source.sign("client", "clientAuth", "DNS:source.example");
    let new = source.key("client");
    let file = destination.remembered("senders");
    let waiting = Waiting::start(&destination.words());
    let said = waiting.refuses(&source.words());
    let why = format!("your certificate has the public key {new}, and another one is recorded for 127.0.0.1");
    assert!(said.contains(&why), "{said}");
    assert!(!said.contains(&file.display().to_string()), "{said}");
    let why = format!("{}:2 has {old} for it. If that host has a new key, give --peer {new} once", file.display());
    waiting.receiver.process.wait_for(&why, TEST_TIMEOUT).expect("it says so");
    assert!(waiting.is_untouched());
    let [tls, folder] = destination.words();
    let waiting = Waiting::start(&[tls, folder, "--peer", &new]);
    carries(&mut waiting.joined(&source.words()), 200);
    carries(&mut Waiting::start(&destination.words()).joined(&source.words()), 200);
}

/// A renewed certificate with the same key is accepted.
#[test]
fn renewed_certificate_keeps_its_trust() {
    let source = Authority::new();
    let destination = source.copy();
    carries(&mut Waiting::start(&destination.words()).joined(&source.words()), 200);
    let remembered = || std::fs::read(source.remembered("receivers")).expect("a file");
    let (before, records) = (source.fingerprint("server"), remembered());
    destination.renew("server", "serverAuth", certificates::LOCALHOST);
    assert_ne!(destination.fingerprint("server"), before);
    carries(&mut Waiting::start(&destination.words()).joined(&source.words()), 200);
    assert_eq!(remembered(), records);
}

/// A host may be given by a name in its certificate; nothing is remembered then.
#[test]
fn peer_is_accepted_by_certificate_name() {
    let right = Authority::new();
    let [tls, folder] = right.words();
    let to_server = [tls, folder, "--peer", "localhost"];
    let to_other = [tls, folder, "--peer", "other.example"];
    let to_client = [tls, folder, "--peer", "source.example"];
    refused(
        [&to_other, &to_client],
        ["and it is for none of the given names (--peer)", "the greeting of a sender: "],
        &to_server,
    );
    let waiting = Waiting::start(&to_other);
    let said = waiting.refuses(&to_server);
    assert!(said.contains("and it is for none of the given names (--peer)"), "{said}");
    assert!(waiting.is_untouched());
    for which in ["senders", "receivers"] {
        assert!(!right.remembered(which).exists(), "{which}");
    }
}

/// Records that cannot be read, or are a link, make the peer be refused before anything is sent, and stay unchanged.
#[test]
fn unusable_records_refuse_peers() {
    let right = Authority::new();
    let other = right.copy();
    let waiting = Waiting::start(&other.words());
    let file = right.remembered("receivers");
    std::fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
    std::fs::write(&file, "127.0.0.1\n").expect("a file");
    let said = waiting.refuses(&right.words());
    let why = format!("{}: line 1 is not a host and a fingerprint", file.display());
    assert!(said.contains(&why) && said.contains("--peer"), "{said}");
    assert_eq!(std::fs::read_to_string(&file).expect("is there"), "127.0.0.1\n");
    let elsewhere = right.path().join("elsewhere");
    std::fs::rename(&file, &elsewhere).expect("moves");
    std::os::unix::fs::symlink(&elsewhere, &file).expect("a link");
    std::fs::write(&elsewhere, "").expect("a file");
    let said = waiting.refuses(&right.words());
    assert!(said.contains(&format!("{}: ", file.display())), "{said}");
    assert_eq!(std::fs::read_to_string(&elsewhere).expect("is there"), "");
    assert!(waiting.is_untouched());
}
