//! Hostile clients of an NBD export, which try to keep others out or to harm its server.

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;

use support::{TEST_TIMEOUT, create_image, run_tool, start_server, temp_dir_on_tmpfs, wait_until};

const MIB: u64 = 1 << 20;

/// Returns a client from `address` that connects to an NBD server, finishes the handshake (NBD spec, "Fixed newstyle
/// negotiation"), and then sends nothing.
fn silent_client(address: [u8; 4], port: u16) -> TcpStream {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
    let socket = socket.expect("a socket");
    rustix::net::bind(&socket, &SocketAddr::from((address, 0))).expect("an address of this host");
    rustix::net::connect(&socket, &SocketAddr::from(([127, 0, 0, 1], port))).expect("connects");
    let mut client = TcpStream::from(socket);
    client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a time limit");
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).expect("is greeted");
    // NBD_FLAG_C_FIXED_NEWSTYLE and NBD_FLAG_C_NO_ZEROES; then NBD_OPT_EXPORT_NAME of the default export.
    let words = [&3u32.to_be_bytes()[..], b"IHAVEOPT", &1u32.to_be_bytes(), &0u32.to_be_bytes()];
    client.write_all(&words.concat()).expect("asks");
    let mut export = [0; 10];
    client.read_exact(&mut export).expect("is in");
    client
}

/// Silent clients, as many as an export takes, keep no other client out: one from another address is accepted at
/// once, one from their own address after a while.
#[test]
fn silent_nbd_clients_give_way() {
    const CLIENTS_MAX: usize = 64;
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), MIB);
    let port = TcpListener::bind("127.0.0.1:0").and_then(|port| port.local_addr());
    let port = port.expect("a free port").port();
    let uri = format!("nbd://127.0.0.1:{port}");
    let server = start_server(&disk, folder.path(), &["--nbd", &uri]);
    for address in [[127, 0, 0, 2], [127, 0, 0, 1]] {
        let _silent: Vec<TcpStream> = (0..CLIENTS_MAX).map(|_| silent_client(address, port)).collect();
        match address {
            [.., 2] => assert_eq!(run_tool("nbdinfo", &["--size", &uri]).trim(), "1048576"),
            _ => wait_until("a client of the same address gets in", || {
                let size = Command::new("nbdinfo").args(["--size", &uri]).output().expect("nbdinfo");
                size.stdout == b"1048576\n"
            }),
        }
    }
    assert_eq!(server.stop().expect("stops"), Some(0));
}
