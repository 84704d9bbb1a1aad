//! Tests of the NBD server over TLS and TCP, with libnbd, QEMU (both use GnuTLS) and Larder's own client.

#[path = "../../larder-block/tests/nbd_support/mod.rs"]
mod nbd_support;

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;

use larder_block::backend::memory::MemoryDevice;
use larder_block::backend::nbd::{NbdDevice, NbdOptions};
use larder_block::event_loop::{Listener, POLL_MAX_DEFAULT};
use larder_block::nbd::NbdUri;
use larder_block::tls::ServerTls;
use larder_block::{BlockDevice, ByteLen, ByteOffset, Loop, ReadBuf};
use larder_export::nbd::{NbdServer, NbdServerOptions};
use nbd_support::{certificates, output, pattern, program};

fn on_loop(test: impl AsyncFn(&Loop)) {
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    on.block_on(test(&on));
}

/// Starts a server that requires TLS with client certificates; returns it and its TCP port.
fn serve(on: &Loop, pki: &Path) -> (NbdServer, u16) {
    let tls = ServerTls::load_directory(pki, true).unwrap_or_else(|error| panic!("{error}"));
    let options = NbdServerOptions { export: "disk".to_owned(), tls: Some(tls), ..NbdServerOptions::default() };
    let device = Rc::new(MemoryDevice::new(ByteLen::mib(8), 512));
    let server = NbdServer::new(on, device, options);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("is bound").port();
    server.listen(Listener::from_descriptor(on, listener.into()).expect("a socket"));
    (server, port)
}

async fn try_beside(on: &Loop, mut command: Command) -> (bool, String) {
    let output = on.run_blocking(move || output(&mut command)).await.expect("a thread");
    let printed = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&printed).into_owned())
}

fn with<const N: usize>(name: &str, arguments: [&str; N]) -> Command {
    let mut command = program(name);
    command.args(arguments);
    command
}

#[test]
fn clients_with_certificates_transfer_data() {
    on_loop(async |on| {
        let folder = nbd_support::folder();
        let pki = folder.path().join("pki");
        certificates::make(&pki);
        let (server, port) = serve(on, &pki);
        let pki = pki.display().to_string();
        let uri = format!("nbds://127.0.0.1:{port}/disk?tls-certificates={pki}");
        let source = folder.path().join("source");
        let data = pattern(8 << 20, 4);
        std::fs::write(&source, &data).expect("room");
        let source = source.display().to_string();
        let back = folder.path().join("back").display().to_string();
        let (done, told) = try_beside(on, with("nbdcopy", [&source, &uri])).await;
        assert!(done, "{told}");
        let credentials = format!("tls-creds-x509,id=tls,endpoint=client,dir={pki}");
        let disk = format!("driver=nbd,host=127.0.0.1,port={port},export=disk,tls-creds=tls,tls-hostname=localhost");
        let compare =
            with("qemu-img", ["convert", "--object", &credentials, "--image-opts", &disk, "-O", "raw", &back]);
        let (done, told) = try_beside(on, compare).await;
        assert!(done, "{told}");
        assert!(std::fs::read(&back).expect("is there") == data);

        let uri: NbdUri = uri.parse().expect("a URI");
        let device = NbdDevice::open(on, &uri, NbdOptions::default()).await;
        let device = device.unwrap_or_else(|error| panic!("{error}"));
        let mut seen = vec![0; data.len()];
        let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut seen));
        read.await.expect("reads");
        assert!(seen == data);
        drop(device);
        server.stop().await;
        assert_eq!(server.statistics().connections, 0);
    });
}

/// Clients without TLS, without a certificate, or with one of an unknown authority are refused.
#[test]
fn clients_without_certificates_are_refused() {
    on_loop(async |on| {
        let folder = nbd_support::folder();
        let (pki, other) = (folder.path().join("pki"), folder.path().join("other"));
        certificates::make(&pki);
        certificates::make(&other);
        let (server, port) = serve(on, &pki);
        let plain = format!("nbd://127.0.0.1:{port}/disk");
        let (in_clear, told) = try_beside(on, with("qemu-img", ["info", &plain])).await;
        assert!(!in_clear && told.contains("TLS"), "{told}");
        // EXPORT_NAME, which skips all options.
        let (in_clear, told) = try_beside(on, with("nbdinfo", ["--list", &plain])).await;
        assert!(!in_clear, "{told}");
        // Trusts the server, but presents a certificate of an authority that the server does not know, or none.
        std::fs::copy(pki.join("ca-cert.pem"), other.join("ca-cert.pem")).expect("room");
        let stranger = format!("nbds://127.0.0.1:{port}/disk?tls-certificates={}", other.display());
        let (is_in, told) = try_beside(on, with("nbdinfo", ["--size", &stranger])).await;
        assert!(!is_in, "{told}");
        for file in ["client-cert.pem", "client-key.pem"] {
            std::fs::remove_file(other.join(file)).expect("is there");
        }
        let (is_in, told) = try_beside(on, with("nbdinfo", ["--size", &stranger])).await;
        assert!(!is_in, "{told}");
        let uri: NbdUri = stranger.parse().expect("a URI");
        assert!(NbdDevice::open(on, &uri, NbdOptions::default()).await.is_err());
        server.stop().await;
        assert_eq!(server.statistics().requests, 0);
    });
}
