//! Tests of the NBD client over TLS, against nbdkit (GnuTLS).

mod nbd_support;

use std::rc::Rc;

use larder_block::backend::nbd::{ConnectError, NbdDevice, NbdOpenError, NbdOptions};
use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_block::nbd::NbdUri;
use larder_block::tls::TlsError;
use larder_block::{BlockDevice, ByteOffset, Loop, ReadBuf, WriteBuf, WriteFlags};
use nbd_support::fake::{connections, script};
use nbd_support::{Place, certificates, pattern};

fn on_loop(test: impl AsyncFn(&Loop)) {
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    on.block_on(test(&on));
}

async fn open(on: &Loop, uri: &str) -> Result<Rc<NbdDevice>, ConnectError> {
    let uri: NbdUri = uri.parse().expect("a URI");
    match NbdDevice::open(on, &uri, NbdOptions::default()).await {
        Ok(device) => Ok(device),
        Err(NbdOpenError::Connect { source, .. }) => Err(source),
        Err(error) => panic!("{error}"),
    }
}

fn uri(place: &Place, folder: &str, more: &str) -> String {
    let socket = place.socket().display().to_string();
    let folder = place.path(folder).display().to_string();
    format!("nbds+unix:///?socket={socket}&tls-certificates={folder}{more}")
}

/// Data is encrypted in both directions, and a broken connection is re-established.
#[test]
fn tls_connection_survives_server_restart() {
    on_loop(async |on| {
        let place = Place::new();
        certificates::make(&place.path("pki"));
        let certificates = format!("--tls-certificates={}", place.path("pki").display());
        let image = place.path("image");
        std::fs::File::create(&image).expect("a file").set_len(32 << 20).expect("room");
        let image = image.display().to_string();
        let serve = ["--tls=require", "--tls-verify-peer", &certificates, "file", &image];
        let mut server = place.nbdkit(&serve);
        let device = open(on, &uri(&place, "pki", "")).await;
        let device = device.unwrap_or_else(|error| panic!("{error}"));
        let data = pattern(5 << 20, 1);
        let write = device.write(ByteOffset::new(512), WriteBuf::new(&data), WriteFlags::FUA);
        write.await.expect("writes");
        server.kill();
        server = place.nbdkit(&serve);
        let mut back = vec![0; data.len()];
        let read = device.read(ByteOffset::new(512), ReadBuf::new(&mut back));
        read.await.expect("reads");
        assert!(back == data);
        assert_eq!(device.statistics().connections, 2);
        server.kill();
        let file = std::fs::read(&image).expect("is there");
        assert!(file[512..512 + data.len()] == data);
    });
}

/// A reconnect uses the last readable certificates if they cannot be read any more.
#[test]
fn unreadable_certificates_stay_in_use() {
    on_loop(async |on| {
        let place = Place::new();
        let (pki, moved) = (place.path("pki"), place.path("moved"));
        certificates::make(&pki);
        let certificates = format!("--tls-certificates={}", moved.display());
        let image = place.path("image");
        let file = std::fs::File::create(&image);
        file.and_then(|file| file.set_len(1 << 20)).expect("an image");
        let image = image.display().to_string();
        let serve = ["--tls=require", "--tls-verify-peer", &certificates, "file", &image];
        std::os::unix::fs::symlink(&pki, &moved).expect("a link");
        let mut server = place.nbdkit(&serve);
        let device = open(on, &uri(&place, "pki", "")).await;
        let device = device.unwrap_or_else(|error| panic!("{error}"));
        server.kill();

        // Now only the server has the path of the certificates.
        std::fs::remove_file(&moved).expect("removes");
        std::fs::rename(&pki, &moved).expect("renames");
        let mut server = place.nbdkit(&serve);
        let mut back = vec![1; 4096];
        let read = device.read(ByteOffset::new(0), ReadBuf::new(&mut back));
        read.await.expect("reads");
        assert_eq!((device.statistics().connections, back), (2, vec![0; 4096]));
        server.kill();

        // Other certificates at the old path are used at once.
        std::fs::remove_dir_all(&moved).expect("removes");
        certificates::make(&moved);
        std::os::unix::fs::symlink(&moved, &pki).expect("a link");
        let _server = place.nbdkit(&serve);
        let mut back = vec![1; 4096];
        let read = device.read(ByteOffset::new(0), ReadBuf::new(&mut back));
        read.await.expect("reads");
        assert_eq!(device.statistics().connections, 3);
    });
}

#[test]
fn untrusted_server_is_refused() {
    on_loop(async |on| {
        let place = Place::new();
        certificates::make(&place.path("pki"));
        certificates::make(&place.path("other"));
        let certificates = format!("--tls-certificates={}", place.path("pki").display());
        let _server = place.nbdkit(&["--tls=require", &certificates, "memory", "1M"]);

        let plain = place.uri("").to_string();
        let error = open(on, &plain).await.err().expect("needs TLS");
        assert!(matches!(error, ConnectError::TlsRequired), "{error}");

        let stranger = open(on, &uri(&place, "other", "")).await;
        let error = stranger.err().expect("another authority");
        assert!(matches!(error, ConnectError::Tls(TlsError::Handshake(_))), "{error}");
        assert!(error.to_string().contains("invalid peer certificate"), "{error}");

        let renamed = open(on, &uri(&place, "pki", "&tls-hostname=example.org")).await;
        let error = renamed.err().expect("another name").to_string();
        assert!(error.contains("example.org"), "{error}");

        let missing = open(on, &uri(&place, "nowhere", "")).await;
        let error = missing.err().expect("no authority").to_string();
        assert!(error.contains("nowhere/ca-cert.pem"), "{error}");

        open(on, &uri(&place, "pki", "")).await.expect("the right one");
    });
}

#[test]
fn server_without_tls_is_refused() {
    on_loop(async |on| {
        let place = Place::new();
        certificates::make(&place.path("pki"));
        let _server = place.nbdkit(&["--tls=off", "memory", "1M"]);
        let error = open(on, &uri(&place, "pki", "")).await.err().expect("is refused");
        assert!(matches!(error, ConnectError::TlsRefused(_)), "{error}");
    });
}

#[test]
fn data_injected_before_tls_is_refused() {
    on_loop(async |on| {
        let place = Place::new();
        certificates::make(&place.path("pki"));
        let server = connections(
            place.std_listener(),
            [script(|mut peer| {
                peer.greet()?;
                peer.option()?;
                // The acknowledgement, and right after it an answer to an option that will be sent under TLS.
                let head = [&0x3e889045565a9u64.to_be_bytes()[..], &5u32.to_be_bytes()].concat();
                let slipped = [&0x3e889045565a9u64.to_be_bytes()[..], &11u32.to_be_bytes()].concat();
                let acknowledged = [&1u32.to_be_bytes()[..], &[0; 4]].concat();
                peer.send(&[&head, &acknowledged, &slipped, &acknowledged])?;
                peer.wait_for_end();
                Ok(())
            })],
        );
        let error = open(on, &uri(&place, "pki", "")).await.err().expect("is refused");
        assert!(matches!(error, ConnectError::Injected(20)), "{error}");
        server.join().expect("the script ends");
    });
}
